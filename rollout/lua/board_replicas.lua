-- KEYS: <ns>:{<fleet>}:fleet:beats. Returns the heartbeats that have not expired, and forgets the others.
forget_silent(now_ms())
return redis.call('HVALS', KEYS[1])
