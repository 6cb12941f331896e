-- KEYS: <ns>:{<fleet>}:fleet:beats. ARGV: replica.
redis.call('HDEL', KEYS[1], ARGV[1])
return redis.call('ZREM', string.sub(KEYS[1], 1, -6) .. 'expiry', ARGV[1])
