-- KEYS: one of <ns>:{<fleet>}:fleet:kept, fleet:pin. ARGV: record, ttl_ms.
allow_when_full()
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
