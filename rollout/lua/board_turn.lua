-- KEYS: <ns>:{<fleet>}:fleet:turns (zset replica -> ms at which its turn ends by itself). Beside it, in the same slot:
-- fleet:expiry (zset of the replicas' heartbeats by ms) and fleet:seen (set of those that ever sent one).
-- ARGV: replica, share, ttl_ms.
-- Returns 1 where the replica has a turn now: at most so large a share of the live replicas have one, and at least one has.
-- A holder that sent heartbeats and sends none any more has no turn: it was killed in it.
local base = string.sub(KEYS[1], 1, -6)
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%d', now))
for _, holder in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local expires = tonumber(redis.call('ZSCORE', base .. 'expiry', holder) or 0)
  if expires <= now and redis.call('SISMEMBER', base .. 'seen', holder) == 1 then
    redis.call('ZREM', KEYS[1], holder)
  end
end
local live = redis.call('ZCOUNT', base .. 'expiry', string.format('(%d', now), '+inf')
local at_most = math.max(1, math.floor(live * ARGV[2]))
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) and redis.call('ZCARD', KEYS[1]) >= at_most then
  return 0
end
redis.call('ZADD', KEYS[1], string.format('%d', now + ARGV[3]), ARGV[1])
return 1
