-- ARGV: now or "", lease_ms, then per lease its group id and attempt. Returns the new deadline of each, 0 where lost.
allow_when_full()
longest_lease(tonumber(ARGV[2]))
local deadline = now_ms(ARGV[1]) + tonumber(ARGV[2])
local out = {}
for i = 3, #ARGV, 2 do
  local gid, attempt = ARGV[i], ARGV[i + 1]
  local r = redis.call('HMGET', group_key(gid), 'state', 'attempt', 'purpose', 'entry')
  if r[1] == 'leased' and r[2] == attempt then
    redis.call('ZADD', P .. 'leases:' .. r[3], int(deadline), gid .. ' ' .. r[4])
    redis.call('HSET', group_key(gid), 'deadline', int(deadline))
    out[#out + 1] = deadline
  else
    out[#out + 1] = 0
  end
end
return out
