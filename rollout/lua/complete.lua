-- ARGV: now or "", group id, attempt, encoded group.
local gid, attempt = ARGV[2], ARGV[3]
local key, mark = group_key(gid), ARGV[3] .. ':complete'
local r = redis.call('HMGET', key, 'state', 'attempt', 'purpose', 'entry', 'done')
if r[5] == mark then -- this very call, resent
  return 1
end
if r[1] ~= 'leased' or r[2] ~= attempt then
  return redis.error_reply('LEASELOST ' .. (r[1] or 'gone') .. ' ' .. (r[2] or '0'))
end
check_kinds()
remove_entry(r[3], gid, r[4])
local now = now_ms(ARGV[1])
tell(gid, now, 'attempt ' .. attempt .. ' complete')
if r[3] == 'train' then
  local entry = redis.call('XADD', P .. 'experience', '*', 'g', gid)
  redis.call('DEL', salvage_key(gid))
  redis.call('HSET', key, 'state', 'experience', 'entry', entry, 'result', ARGV[4], 'done', mark)
  count('leased', 'train', -1)
  count('experience', 'train', 1)
else
  redis.call('HSET', key, 'result', ARGV[4], 'done', mark)
  finish(gid, r[3], 'leased', 'delivered', '', now)
end
return 1
