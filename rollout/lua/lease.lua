-- ARGV: now or "", nonce, consumer, count, lease_ms, purposes...
-- Returns {group id, attempt, deadline, request, salvage as names and chunks, the gate's max_age or ""} each: expired leases, then returned
-- groups, then fresh ones.
local now = now_ms(ARGV[1])
local nonce, consumer, want, lease_ms = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local MOST_BURIED = 1000 -- a call ends the dead it meets, but only so many
local out, granted, buried, former = {}, {}, 0, {}
local max_age = redis.call('HGET', P .. 'gate', 'max_age') or ''
local longest = lease_ms -- of all that were ever asked for

local function bury(purpose, gid, entry, from, reason)
  remove_entry(purpose, gid, entry)
  finish(gid, purpose, from, 'dead', reason, now)
  buried = buried + 1
end

-- Lease one group, or bury it. `from` is its state so far; `cost` what this takeover adds to its failures.
local function take(purpose, gid, entry, from, cost)
  local key = group_key(gid)
  local r = redis.call('HMGET', key, 'attempt', 'failures', 'expires', 'request', 'consumer')
  if not (r[1] and r[2] and r[3] and r[4]) then
    return bury(purpose, gid, entry, from, 'corrupt: record lost')
  end
  local failures = tonumber(r[2]) + cost
  if r[3] ~= '' and now >= tonumber(r[3]) then
    return bury(purpose, gid, entry, from, 'deadline')
  end
  if failures >= limits().max_failures then
    return bury(purpose, gid, entry, from, 'lease expired; ' .. int(failures) .. ' failures')
  end
  if from == 'leased' and r[5] then
    former[purpose .. ' ' .. r[5]] = true
  end
  local over = from == 'leased' and r[5] and ', taken over from ' .. r[5] or ''
  local attempt, deadline, member = tonumber(r[1]) + 1, now + lease_ms, gid .. ' ' .. entry
  redis.call('ZREM', P .. 'returned:' .. purpose, member)
  redis.call('ZADD', P .. 'leases:' .. purpose, int(deadline), member)
  redis.call('HSET', key, 'state', 'leased', 'attempt', int(attempt), 'failures', int(failures), 'consumer', consumer,
    'deadline', int(deadline))
  tell(gid, now, 'attempt ' .. int(attempt) .. ' leased by ' .. consumer .. over)
  if from == 'queued' then
    count('queued', purpose, -1)
    count('leased', purpose, 1)
  end
  out[#out + 1] = {gid, attempt, deadline, r[4], redis.call('HGETALL', salvage_key(gid)), max_age}
  granted[#granted + 1] = gid
end

-- How many more groups of the purpose may start.
local function room(purpose)
  local most = want - #out
  local credits = purpose == 'train' and redis.call('HGET', P .. 'gate', 'credits')
  if credits then
    local flow = redis.call('HMGET', LEDGER, 'leased:train', 'experience:train')
    most = math.min(most, tonumber(credits) - tonumber(flow[1] or 0) - tonumber(flow[2] or 0))
  end
  return most
end

local function take_members(purpose, members, from, cost)
  for _, member in ipairs(members) do
    local space = string.find(member, ' ', 1, true)
    local gid, entry = string.sub(member, 1, space - 1), string.sub(member, space + 1)
    redis.call('XCLAIM', rollouts(purpose), ENGINES, consumer, '0', entry, 'JUSTID')
    take(purpose, gid, entry, from, cost)
  end
end

local function take_fresh(purpose)
  local most = room(purpose)
  if most <= 0 or redis.call('EXISTS', rollouts(purpose)) == 0 then
    return false
  end
  local reply = redis.call('XREADGROUP', 'GROUP', ENGINES, RETURNED, 'COUNT', int(most), 'STREAMS', rollouts(purpose), '>')
  if not reply or not reply[1] then
    return false
  end
  for _, item in ipairs(reply[1][2]) do -- where one of them ends this script, the others are found among the returned
    redis.call('ZADD', P .. 'returned:' .. purpose, int(now), (item[2][2] or '') .. ' ' .. item[1])
  end
  for _, item in ipairs(reply[1][2]) do
    local entry, gid = item[1], item[2][2] or ''
    local recorded = is_open(gid) and (redis.call('HGET', group_key(gid), 'entry') or entry)
    if recorded == entry then
      redis.call('XCLAIM', rollouts(purpose), ENGINES, consumer, '0', entry, 'JUSTID')
      take(purpose, gid, entry, 'queued', 0)
    else -- not written by submit
      remove_entry(purpose, gid, entry)
      dead_letter(gid, 'corrupt: stream entry ' .. entry .. ' names no waiting group', now)
      buried = buried + 1
    end
  end
  return true
end

-- A deadline further ahead than twice the longest lease is of a clock that was set back since; twice, so that a small
-- correction of the clock takes nobody's lease away.
local function take_expired(purpose)
  local leases, most = P .. 'leases:' .. purpose, int(want - #out)
  local members = redis.call('ZRANGEBYSCORE', leases, '-inf', int(now), 'LIMIT', '0', most)
  if #members == 0 then
    members = redis.call('ZRANGEBYSCORE', leases, '(' .. int(now + 2 * longest), '+inf', 'LIMIT', '0', most)
  end
  take_members(purpose, members, 'leased', 1)
  return #members > 0
end

local function take_returned(purpose)
  local most = room(purpose)
  if most <= 0 then
    return false
  end
  local members = redis.call('ZRANGE', P .. 'returned:' .. purpose, '0', int(most - 1))
  take_members(purpose, members, 'queued', 0)
  return #members > 0
end

local function drain(step, purpose)
  while #out < want and buried < MOST_BURIED and step(purpose) do
  end
end

local function holds(owner, purpose)
  local stream = rollouts(purpose)
  return redis.call('EXISTS', stream) == 1 and #redis.call('XPENDING', stream, ENGINES, '-', '+', '1', owner) > 0
end

local last = redis.call('HGET', P .. 'calls', consumer)
if last and string.sub(last, 1, #nonce + 1) == nonce .. ' ' then -- this very call, resent
  for gid in string.gmatch(string.sub(last, #nonce + 2), '%S+') do
    local r = redis.call('HMGET', group_key(gid), 'state', 'consumer', 'attempt', 'deadline', 'request')
    if r[1] == 'leased' and r[2] == consumer then
      out[#out + 1] = {gid, tonumber(r[3]), tonumber(r[4]), r[5], redis.call('HGETALL', salvage_key(gid)), max_age}
    end
  end
  return out
end

check_kinds()
allow_when_full()
longest = longest_lease(lease_ms)
for i = 6, #ARGV do
  drain(take_expired, ARGV[i])
end
for i = 6, #ARGV do
  drain(take_returned, ARGV[i])
  drain(take_fresh, ARGV[i])
end
-- A process that let leases expire is most likely gone: forget its consumer once it holds nothing.
for key in pairs(former) do
  local purpose, owner = string.match(key, '^(%S+) (.*)$')
  if owner ~= consumer and not holds(owner, purpose) then
    redis.call('XGROUP', 'DELCONSUMER', rollouts(purpose), ENGINES, owner)
    if not (holds(owner, 'train') or holds(owner, 'eval') or holds(owner, 'collect')) then
      redis.call('HDEL', P .. 'calls', owner)
    end
  end
end
if #granted > 0 then
  redis.call('HSET', P .. 'calls', consumer, nonce .. ' ' .. table.concat(granted, ' '))
end
return out
