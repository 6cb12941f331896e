-- Prepended to the board's scripts. KEYS[1] is a key of one fleet, <ns>:{<fleet>}:fleet:<name>; F is what all of them begin
-- with, one slot of a Redis Cluster by the tag {fleet}.

local F = string.match(KEYS[1], '^(.*:)')

local function int(x)
  return string.format('%d', x)
end

-- Server time.
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- At maxmemory a script is refused at its first write that may grow memory, and not afterwards: see common.lua. A trainer
-- and replicas that the board refuses would drain nothing, and what they write replaces what they wrote before.
local function allow_when_full()
  redis.call('DEL', F .. 'none')
end

-- Forget the heartbeats that have expired. One that expires further ahead than twice the longest was ever to last is of a
-- clock that was set back since: its replica sends another one soon, or is gone. Who answers users is looked through by
-- its own times too: an older release, which keeps no such list, leaves in it whom it forgets.
local function forget_silent(now)
  local expiry, answering, longest = F .. 'expiry', F .. 'answering', redis.call('GET', F .. 'longest_beat')
  local silent = redis.call('ZRANGEBYSCORE', expiry, '-inf', int(now))
  redis.call('ZREMRANGEBYSCORE', answering, '-inf', int(now))
  if longest then
    local too_far = '(' .. int(now + 2 * longest)
    for _, replica in ipairs(redis.call('ZRANGEBYSCORE', expiry, too_far, '+inf')) do
      silent[#silent + 1] = replica
    end
    redis.call('ZREMRANGEBYSCORE', answering, too_far, '+inf')
  end
  for _, replica in ipairs(silent) do
    redis.call('HDEL', F .. 'beats', replica)
    redis.call('ZREM', expiry, replica)
  end
end
