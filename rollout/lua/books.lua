-- Returns {ledger, {submission id, marks, ...}, idempotency, {open group id, state or "", purpose or "", 1 where it
-- stands where it would be handed out, ...}, {counter, current}, writer's {token, identity}}. Reads only.
local delivered = {} -- purpose -> newest entry id that the consumer group has given anybody

local function last_delivered(purpose)
  if not delivered[purpose] then
    delivered[purpose] = '0-0'
    for _, info in ipairs(redis.call('XINFO', 'GROUPS', rollouts(purpose))) do
      for i = 1, #info, 2 do
        if info[2] == ENGINES and info[i] == 'last-delivered-id' then
          delivered[purpose] = info[i + 1]
        end
      end
    end
  end
  return delivered[purpose]
end

local function later(id, than)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  local than_ms, than_seq = string.match(than, '^(%d+)-(%d+)$')
  if ms == than_ms then
    return tonumber(seq) > tonumber(than_seq)
  end
  return tonumber(ms) > tonumber(than_ms)
end

-- Of a group whose stream has its entry: who looks where it stands? The writer walks all experience; a lease has to run
-- out or to have been given back, and an entry that nobody was given yet is read next.
local function handed_out(gid, state, purpose, entry)
  local member = gid .. ' ' .. entry
  if state == 'leased' then
    return redis.call('ZSCORE', P .. 'leases:' .. purpose, member)
  end
  return state == 'experience' or later(entry, last_delivered(purpose))
    or redis.call('ZSCORE', P .. 'returned:' .. purpose, member)
end

local marks, open = {}, {}
for _, sid in ipairs(redis.call('SMEMBERS', P .. 'subs')) do
  local letters = redis.call('GET', P .. 'sub:' .. sid) or ''
  marks[#marks + 1] = sid
  marks[#marks + 1] = letters
  local at = string.find(letters, '.', 1, true)
  while at do
    local gid = sid .. '-' .. int(at - 1)
    local r = redis.call('HMGET', group_key(gid), 'state', 'purpose', 'entry')
    local stream = r[1] == 'experience' and P .. 'experience' or rollouts(r[2] or '')
    local listed = r[3] and redis.call('XRANGE', stream, r[3], r[3])[1]
    open[#open + 1] = gid
    open[#open + 1] = r[1] or ''
    open[#open + 1] = r[2] or ''
    open[#open + 1] = listed and listed[2][2] == gid and handed_out(gid, r[1], r[2], r[3]) and 1 or 0
    at = string.find(letters, '.', at + 1, true)
  end
end
return {redis.call('HGETALL', LEDGER), marks, redis.call('HGETALL', P .. 'idempotency'), open,
  redis.call('HMGET', P .. 'weights', 'counter', 'current'), redis.call('HMGET', P .. 'writer', 'token', 'identity')}
