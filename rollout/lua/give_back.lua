-- ARGV: now or "", group id, attempt, reason, "release" | "fail" | "reject", "forget" or "".
local gid, attempt, reason, verb = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local key, mark = group_key(gid), ARGV[3] .. ':' .. ARGV[5]
local r = redis.call('HMGET', key, 'state', 'attempt', 'purpose', 'entry', 'done', 'failures')
if r[5] == mark then -- this very call, resent
  return 1
end
if r[1] ~= 'leased' or r[2] ~= attempt then
  return redis.error_reply('LEASELOST ' .. (r[1] or 'gone') .. ' ' .. (r[2] or '0'))
end
check_kinds()
allow_when_full()
local now, purpose, entry = now_ms(ARGV[1]), r[3], r[4]
local failures = tonumber(r[6]) + (verb == 'fail' and 1 or 0)
if ARGV[6] == 'forget' then
  redis.call('DEL', salvage_key(gid))
end
redis.call('HSET', key, 'done', mark, 'failures', int(failures))
if verb == 'reject' or (verb == 'fail' and failures >= limits().max_failures) then
  remove_entry(purpose, gid, entry)
  finish(gid, purpose, 'leased', 'dead', reason, now)
  return 1
end
local member = gid .. ' ' .. entry
redis.call('XCLAIM', rollouts(purpose), ENGINES, RETURNED, '0', entry, 'JUSTID')
redis.call('ZREM', P .. 'leases:' .. purpose, member)
redis.call('ZADD', P .. 'returned:' .. purpose, int(now), member)
redis.call('HSET', key, 'state', 'queued')
tell(gid, now, 'attempt ' .. attempt .. (verb == 'fail' and ' failed: ' or ' given back: ') .. reason)
count('leased', purpose, -1)
count('queued', purpose, 1)
return 1
