-- ARGV: now or "", owner, ttl_ms, max_depth, max_failures, retain_s, dead_retain_s (or "" each). Returns the new token.
-- Limits that the operator's gateway has set are left as they are.
local now, owner = now_ms(ARGV[1]), ARGV[2]
local w = redis.call('HMGET', P .. 'writer', 'owner', 'until', 'ttl_ms')
local left = time_left(w[2], w[3], now)
if (w[1] or '') ~= '' and w[1] ~= owner and left then
  return redis.error_reply('WRITERBUSY ' .. int(left) .. ' ' .. w[1])
end
allow_when_full()
local token = redis.call('HINCRBY', P .. 'writer', 'token', 1)
redis.call('HSET', P .. 'writer', 'owner', owner, 'until', int(now + tonumber(ARGV[3])), 'ttl_ms', ARGV[3],
  'cursor', '0-0', 'call', '')
if ARGV[4] ~= '' and redis.call('EXISTS', P .. 'limits') == 0 then
  set_limits(ARGV[4], ARGV[5], ARGV[6], ARGV[7])
end
return token
