-- ARGV: now or "", submission id, idempotency key or "", body digest, max_depth, max_failures, retain_s, dead_retain_s
-- ("" each from a producer that has no say in them), then per group its purpose, time to live (ms or ""), request.
-- Returns {submission id, groups, created}.
local now = now_ms(ARGV[1])
local sid, idem, digest = ARGV[2], ARGV[3], ARGV[4]
local FIRST = 9
local n = (#ARGV - FIRST + 1) / 3

if idem ~= '' then
  local known = redis.call('HGET', P .. 'idempotency', idem)
  if known then
    local space = string.find(known, ' ', 1, true)
    local old = string.sub(known, space + 1)
    if string.sub(known, 1, space - 1) ~= digest then
      return redis.error_reply('CONFLICT ' .. old)
    end
    return {old, redis.call('STRLEN', P .. 'sub:' .. old), old == sid and 1 or 0}
  end
end
if redis.call('EXISTS', P .. 'sub:' .. sid) == 1 then -- this very call, resent
  return {sid, n, 1}
end

check_kinds()
if ARGV[5] ~= '' then
  set_limits(ARGV[5], ARGV[6], ARGV[7], ARGV[8])
end
local refused = full(n)
if refused then
  return refused
end

local counts = {}
for i = 0, n - 1 do
  local at = FIRST + 3 * i
  local purpose, gid, ttl = ARGV[at], sid .. '-' .. int(i), ARGV[at + 1]
  if not counts[purpose] then
    counts[purpose] = 0
    if redis.call('EXISTS', rollouts(purpose)) == 0 then
      redis.call('XGROUP', 'CREATE', rollouts(purpose), ENGINES, '0', 'MKSTREAM')
    end
  end
  counts[purpose] = counts[purpose] + 1
  local entry = redis.call('XADD', rollouts(purpose), '*', 'g', gid)
  redis.call('HSET', group_key(gid), 'state', 'queued', 'purpose', purpose, 'attempt', '0', 'failures', '0', 'expires',
    ttl == '' and '' or int(now + tonumber(ttl)), 'request', ARGV[at + 2], 'entry', entry, 'story', int(now) .. ' accepted\n')
end
for purpose, by in pairs(counts) do
  count('queued', purpose, by)
end
redis.call('HINCRBY', LEDGER, 'accepted', n)
redis.call('SET', P .. 'sub:' .. sid, string.rep('.', n))
redis.call('SADD', P .. 'subs', sid)
if idem ~= '' then
  redis.call('HSET', P .. 'idempotency', idem, digest .. ' ' .. sid)
end
return {sid, n, 1}
