-- KEYS: <ns>:{<fleet>}:fleet:beats. Returns the heartbeats that have not expired, and forgets the others.
local expiry = string.sub(KEYS[1], 1, -6) .. 'expiry'
local t = redis.call('TIME')
local now = string.format('%d', t[1] * 1000 + math.floor(t[2] / 1000))
for _, replica in ipairs(redis.call('ZRANGEBYSCORE', expiry, '-inf', now)) do
  redis.call('HDEL', KEYS[1], replica)
  redis.call('ZREM', expiry, replica)
end
return redis.call('HVALS', KEYS[1])
