-- Prepended to every script of a run. One run's keys, all in one slot of a Redis Cluster by the tag {run}:
--
--   <ns>:{<run>}:ledger                hash    "queued:<purpose>", "leased:<purpose>", "experience:train", "accepted" and one
--                                              counter per final state: groups
--   <ns>:{<run>}:rollouts:<purpose>    stream  g=<group id>; group "engines" from id 0; an entry lives until its group is
--                                              generated or ended, so entries = queued + leased, pending ones of consumers
--                                              other than "returned" = leased
--   <ns>:{<run>}:leases:<purpose>      zset    "<group id> <entry id>" by lease deadline (ms)
--   <ns>:{<run>}:returned:<purpose>    zset    "<group id> <entry id>" by time of release: leased again before fresh entries
--   <ns>:{<run>}:experience            stream  g=<group id>; scored, not settled. The one fenced writer walks it with a cursor
--   <ns>:{<run>}:group:<group id>      hash    state purpose attempt failures expires request entry consumer deadline
--                                              result holder reason done retried story kept letter; expires `retain_s` after the
--                                              group's end, a dead one's `dead_retain_s`
--   <ns>:{<run>}:salvage:<group id>    hash    "<sample>:<origin>:<start>:<stop>" -> tokens of an unfinished sample (rollout.salvage)
--   <ns>:{<run>}:subs                  set     submission ids
--   <ns>:{<run>}:sub:<submission id>   string  one character per group, "." until its end: one byte a group that outlives
--                                              the record, and lets the audit count without the ledger
--   <ns>:{<run>}:idempotency           hash    key -> "<body digest> <submission id>", as long as the run
--   <ns>:{<run>}:dead                  stream  g=<group id> reason=<text> at=<ms>; the newest 10,000, "letter" in the record
--   <ns>:{<run>}:retried               string  how often a dead group was to be tried again
--   <ns>:{<run>}:longest_lease         string  the longest that a lease was ever asked for (ms)
--   <ns>:{<run>}:writer                hash    token owner until ttl_ms cursor call identity
--   <ns>:{<run>}:gate                  hash    credits max_age
--   <ns>:{<run>}:weights               hash    counter (newest number given), version and current (the pointer, JSON)
--   <ns>:{<run>}:limits                hash    max_depth max_failures retain_s dead_retain_s; without it the defaults below
--   <ns>:{<run>}:calls                 hash    consumer -> "<nonce> <group ids>" of its last lease, for a resent call
--
-- A group id is "<submission id>-<index>". KEYS[1] is the ledger. The client resends a call whose answer it lost, so
-- every script gives the same effect when it runs twice with the same arguments.

local LEDGER = KEYS[1]
local P = string.sub(LEDGER, 1, -7)
local ENGINES = 'engines'
local RETURNED = 'returned'
local OPEN = {queued = true, leased = true, experience = true}
local MOST_STORY = 4096 -- bytes
local MOST_DEAD = 10000
local LETTER = {trained = 't', delivered = 'd', filtered = 'f', stale = 's', dead = 'x', cancelled = 'c'}

local function int(x)
  return string.format('%d', x)
end

local function group_key(gid)
  return P .. 'group:' .. gid
end

local function salvage_key(gid)
  return P .. 'salvage:' .. gid
end

local function rollouts(purpose)
  return P .. 'rollouts:' .. purpose
end

-- Server time, unless a test passes its own.
local function now_ms(given)
  if given ~= '' then
    return tonumber(given)
  end
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- How long a claim lasts yet, nil where it has run out. One that would last twice as long as it was asked for is of a clock
-- that was set back since; twice, so that a small correction of the clock takes nobody's claim away. Without `ttl_ms` the
-- version before wrote it.
local function time_left(until_ms, ttl_ms, now)
  local left = tonumber(until_ms or 0) - now
  return left > 0 and left <= 2 * tonumber(ttl_ms or left) and left or nil
end

-- At maxmemory a script is refused at its first write if that may grow memory, and not afterwards. What drains the
-- queue or keeps a lease must work then, so it starts with a write that cannot grow anything.
local function allow_when_full()
  redis.call('XACK', P .. 'rollouts:train', ENGINES, '0-1')
end

-- Redis keeps what a script wrote before it failed. Where somebody else wrote to a key that all groups share, this fails
-- before anything is written, so that they are what they were once the key is mended.
local function check_kinds()
  redis.call('HLEN', LEDGER)
  for _, name in ipairs({'limits', 'gate', 'calls', 'idempotency'}) do
    redis.call('HLEN', P .. name)
  end
  redis.call('SCARD', P .. 'subs')
  redis.call('XLEN', P .. 'dead')
  redis.call('XLEN', P .. 'experience')
  for _, purpose in ipairs({'train', 'eval', 'collect'}) do
    redis.call('XLEN', rollouts(purpose))
    redis.call('ZCARD', P .. 'leases:' .. purpose)
    redis.call('ZCARD', P .. 'returned:' .. purpose)
  end
end

-- The longest that a lease was ever asked for, with this one.
local function longest_lease(lease_ms)
  local known = tonumber(redis.call('GET', P .. 'longest_lease') or 0)
  if lease_ms > known then
    redis.call('SET', P .. 'longest_lease', int(lease_ms))
  end
  return math.max(known, lease_ms)
end

local function limits()
  local r = redis.call('HMGET', P .. 'limits', 'max_depth', 'max_failures', 'retain_s', 'dead_retain_s')
  return {max_depth = tonumber(r[1] or 65536), max_failures = tonumber(r[2] or 4), retain_s = tonumber(r[3] or 3600),
    dead_retain_s = tonumber(r[4] or 86400)}
end

local function set_limits(max_depth, max_failures, retain_s, dead_retain_s)
  redis.call('HSET', P .. 'limits', 'max_depth', max_depth, 'max_failures', max_failures, 'retain_s', retain_s,
    'dead_retain_s', dead_retain_s)
end

-- An error reply when so many more groups would be too many.
local function full(more)
  local most, depth = limits().max_depth, 0
  for _, value in ipairs(redis.call('HMGET', LEDGER, 'queued:train', 'queued:eval', 'queued:collect', 'leased:train',
    'leased:eval', 'leased:collect', 'experience:train')) do
    depth = depth + tonumber(value or 0)
  end
  if depth + more > most then
    return redis.error_reply('FULL ' .. int(depth) .. ' ' .. int(most))
  end
  return nil
end

local function count(state, purpose, by)
  if OPEN[state] then
    state = state .. ':' .. purpose
  end
  redis.call('HINCRBY', LEDGER, state, by)
end

-- What became of a group, a line an event; the newest of them where there are many. Only of a group that has a record.
local function tell(gid, now, event)
  local story = (redis.call('HGET', group_key(gid), 'story') or '') .. int(now) .. ' ' .. string.gsub(event, '%s+', ' ') .. '\n'
  if #story > MOST_STORY then
    story = string.match(string.sub(story, -MOST_STORY), '\n(.*)$') or ''
  end
  redis.call('HSET', group_key(gid), 'story', story)
end

-- Take a letter away. The record of its group lives no longer than that of any group that has ended.
local function unletter(id, gid)
  redis.call('XDEL', P .. 'dead', id)
  local key = group_key(gid)
  if redis.call('HGET', key, 'letter') == id then
    redis.call('HDEL', key, 'letter')
    if redis.call('TTL', key) > limits().retain_s then
      redis.call('EXPIRE', key, int(limits().retain_s))
    end
  end
end

-- Returns its id.
local function dead_letter(gid, reason, now)
  local id = redis.call('XADD', P .. 'dead', '*', 'g', gid, 'reason', reason, 'at', int(now))
  while redis.call('XLEN', P .. 'dead') > MOST_DEAD do
    local oldest = redis.call('XRANGE', P .. 'dead', '-', '+', 'COUNT', '1')[1]
    unletter(oldest[1], oldest[2][2] or '')
  end
  return id
end

-- Whether the name is of a group that was accepted and has not ended. Anything else in a stream was not written by these
-- scripts: the ledger has nothing to move for it.
local function is_open(gid)
  local sid, index = string.match(gid, '^([^ ]+)%-(%d+)$')
  return sid and #index < 10 and redis.call('GETRANGE', P .. 'sub:' .. sid, index, index) == '.'
end

-- End a group: ledger, its character, its record's remaining life.
local function finish(gid, purpose, from, outcome, reason, now)
  count(from, purpose, -1)
  count(outcome, purpose, 1)
  local sid, index = string.match(gid, '^(.*)%-(%d+)$')
  redis.call('SETRANGE', P .. 'sub:' .. sid, index, LETTER[outcome])
  local letter = outcome == 'dead' and dead_letter(gid, reason, now) or ''
  redis.call('DEL', salvage_key(gid))
  local key = group_key(gid)
  if redis.call('EXISTS', key) == 1 then
    tell(gid, now, outcome .. (reason == '' and '' or ': ' .. reason))
    redis.call('HSET', key, 'state', outcome, 'reason', reason, 'letter', letter)
    if outcome == 'cancelled' then -- cost nobody anything: submitted and cancelled again and again, prompts would pile up
      redis.call('HDEL', key, 'request')
    end
    local kept = limits()
    redis.call('EXPIRE', key, int(outcome == 'dead' and math.max(kept.retain_s, kept.dead_retain_s) or kept.retain_s))
  end
end

-- Take a group's entry out of its rollout stream, whoever holds it. First, so that it also runs at maxmemory.
local function remove_entry(purpose, gid, entry)
  local member = gid .. ' ' .. entry
  redis.call('XACK', rollouts(purpose), ENGINES, entry)
  redis.call('XDEL', rollouts(purpose), entry)
  redis.call('ZREM', P .. 'leases:' .. purpose, member)
  redis.call('ZREM', P .. 'returned:' .. purpose, member)
end

-- An error reply when the token is not the newest or was released.
local function fenced(token)
  local w = redis.call('HMGET', P .. 'writer', 'token', 'owner')
  if w[1] ~= token or (w[2] or '') == '' then
    return redis.error_reply('FENCED token ' .. token .. ' is not the writer; the newest is ' .. (w[1] or 'none')
      .. ((w[2] or '') == '' and ', released' or ''))
  end
  return nil
end
