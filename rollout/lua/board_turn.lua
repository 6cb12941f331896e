-- KEYS: <ns>:{<fleet>}:fleet:turns (zset replica -> ms at which its turn ends by itself). Beside it, in the same slot:
-- fleet:expiry (zset of the replicas' heartbeats by ms), fleet:answering (of those that answer users, the same) and
-- fleet:seen (set of those that ever sent one).
-- ARGV: replica, share, ttl_ms.
-- Returns 1 where the replica has a turn now: at most so large a share of those that answer users have one, and at least
-- one has. A replica that answers none takes its turn like the others: users who came to it earlier may still wait for
-- their answers, and one of an older release answers them although its heartbeat does not say so here.
-- A holder that sent heartbeats and sends none any more has no turn: it was killed in it. Nor has one whose turn would end
-- further ahead than twice what all ask for: the clock was set back in it.
local now = now_ms()
forget_silent(now)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', int(now))
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. int(now + 2 * ARGV[3]), '+inf')
for _, holder in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if not redis.call('ZSCORE', F .. 'expiry', holder) and redis.call('SISMEMBER', F .. 'seen', holder) == 1 then
    redis.call('ZREM', KEYS[1], holder)
  end
end
local at_most = math.max(1, math.floor(redis.call('ZCARD', F .. 'answering') * ARGV[2]))
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) and redis.call('ZCARD', KEYS[1]) >= at_most then
  return 0
end
redis.call('ZADD', KEYS[1], int(now + ARGV[3]), ARGV[1])
return 1
