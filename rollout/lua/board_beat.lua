-- KEYS: <ns>:{<fleet>}:fleet:beats (hash replica -> heartbeat). Beside it, in the same slot: fleet:expiry (zset by ms) and
-- fleet:seen (set). ARGV: replica, heartbeat, ttl_ms.
local base = string.sub(KEYS[1], 1, -6)
local t = redis.call('TIME')
redis.call('ZADD', base .. 'expiry', string.format('%d', t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[3]), ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('SADD', base .. 'seen', ARGV[1])
return 1
