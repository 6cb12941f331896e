-- KEYS: <ns>:{<fleet>}:fleet:beats (hash replica -> heartbeat). Beside it, in the same slot: fleet:expiry (zset by ms),
-- fleet:answering (of those that answer users, the same), fleet:seen (set) and fleet:longest_beat (ms).
-- ARGV: replica, heartbeat, ttl_ms, "1" where it answers users and "0" where not.
allow_when_full()
if tonumber(ARGV[3]) > tonumber(redis.call('GET', F .. 'longest_beat') or 0) then
  redis.call('SET', F .. 'longest_beat', ARGV[3])
end
local expiry = int(now_ms() + ARGV[3])
redis.call('ZADD', F .. 'expiry', expiry, ARGV[1])
if ARGV[4] == '1' then
  redis.call('ZADD', F .. 'answering', expiry, ARGV[1])
else
  redis.call('ZREM', F .. 'answering', ARGV[1])
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('SADD', F .. 'seen', ARGV[1])
return 1
