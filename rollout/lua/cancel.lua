-- ARGV: now or "", submission id. Returns how many groups ended.
local sid = ARGV[2]
local n = redis.call('STRLEN', P .. 'sub:' .. sid)
if n == 0 then
  return redis.error_reply('NOTFOUND ' .. sid)
end
check_kinds()
allow_when_full()
local now, ended = now_ms(ARGV[1]), 0
for i = 0, n - 1 do
  local gid = sid .. '-' .. int(i)
  local r = redis.call('HMGET', group_key(gid), 'state', 'purpose', 'entry')
  if r[1] == 'queued' or r[1] == 'leased' then
    remove_entry(r[2], gid, r[3])
    finish(gid, r[2], r[1], 'cancelled', 'cancelled', now)
    ended = ended + 1
  end
end
return ended
