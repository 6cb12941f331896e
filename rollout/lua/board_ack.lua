-- KEYS: <ns>:{<fleet>}:fleet:epoch. ARGV: epoch, replica, host, ttl_s. Ignored unless the newest and not frozen.
local e = redis.call('HMGET', KEYS[1], 'number', 'frozen')
if e[1] ~= ARGV[1] or e[2] ~= '' then
  return 0
end
local acks = string.sub(KEYS[1], 1, -6) .. 'acks:' .. ARGV[1]
redis.call('HSET', acks, ARGV[2], ARGV[3])
redis.call('EXPIRE', acks, ARGV[4])
return 1
