-- KEYS: <ns>:{<fleet>}:fleet:beats (hash replica -> heartbeat). Beside it, in the same slot: fleet:expiry (zset by ms),
-- fleet:seen (set) and fleet:longest_beat (ms). ARGV: replica, heartbeat, ttl_ms.
allow_when_full()
if tonumber(ARGV[3]) > tonumber(redis.call('GET', F .. 'longest_beat') or 0) then
  redis.call('SET', F .. 'longest_beat', ARGV[3])
end
redis.call('ZADD', F .. 'expiry', int(now_ms() + ARGV[3]), ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('SADD', F .. 'seen', ARGV[1])
return 1
