-- KEYS: <ns>:{<fleet>}:fleet:beats. ARGV: replica.
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', F .. 'answering', ARGV[1])
return redis.call('ZREM', F .. 'expiry', ARGV[1])
