-- ARGV: name. Unless the run's server has one; returns the one that it has then.
allow_when_full()
redis.call('HSETNX', P .. 'writer', 'identity', ARGV[1])
return redis.call('HGET', P .. 'writer', 'identity')
