-- KEYS: <ns>:{<fleet>}:fleet:epoch. ARGV: epoch, replica, host, ttl_s. Ignored unless the newest and not frozen.
local e = redis.call('HMGET', KEYS[1], 'number', 'frozen')
if e[1] ~= ARGV[1] or e[2] ~= '' then
  return 0
end
local acks = F .. 'acks:' .. ARGV[1]
allow_when_full()
redis.call('HSET', acks, ARGV[2], ARGV[3])
redis.call('EXPIRE', acks, ARGV[4])
return 1
