-- Returns {ledger, {submission id, marks, ...}, idempotency, {open group id, state or "", purpose or "", 1 where its stream
-- has its entry, ...}, {counter, current}, writer's {token, identity}}. Reads only.
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
    open[#open + 1] = listed and listed[2][2] == gid and 1 or 0
    at = string.find(letters, '.', at + 1, true)
  end
end
return {redis.call('HGETALL', LEDGER), marks, redis.call('HGETALL', P .. 'idempotency'), open,
  redis.call('HMGET', P .. 'weights', 'counter', 'current'), redis.call('HMGET', P .. 'writer', 'token', 'identity')}
