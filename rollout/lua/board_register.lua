-- KEYS: <ns>:{<fleet>}:fleet:runs (set). ARGV: run.
allow_when_full()
return redis.call('SADD', KEYS[1], ARGV[1])
