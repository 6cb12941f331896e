-- ARGV: now or "", nonce, group id. A dead group waits again, with no failures and no deadline. Not one that a writer has
-- taken: a step of its journal may name it, and none is to name it twice.
local now, nonce, gid = now_ms(ARGV[1]), ARGV[2], ARGV[3]
local key = group_key(gid)
local r = redis.call('HMGET', key, 'state', 'purpose', 'retried', 'letter', 'request', 'holder')
if r[3] == nonce then -- this very call, resent
  return 1
end
if r[1] ~= 'dead' or not r[5] then
  return redis.error_reply('NOTDEAD ' .. (r[1] or 'gone'))
end
if r[6] then
  return redis.error_reply('NOTDEAD taken')
end
local refused = full(1)
if refused then
  return refused
end
check_kinds()
local entry = redis.call('XADD', rollouts(r[2]), '*', 'g', gid)
if (r[4] or '') ~= '' then
  unletter(r[4], gid)
end
redis.call('HSET', key, 'state', 'queued', 'failures', '0', 'expires', '', 'entry', entry, 'retried', nonce)
redis.call('HDEL', key, 'reason', 'result')
redis.call('PERSIST', key)
tell(gid, now, 'to be tried again')
local sid, index = string.match(gid, '^(.*)%-(%d+)$')
redis.call('SETRANGE', P .. 'sub:' .. sid, index, '.')
count('dead', r[2], -1)
redis.call('INCR', P .. 'retried')
count('queued', r[2], 1)
return 1
