-- ARGV: now or "", group id, attempt, then per chunk its name "index:origin:start:stop" and its bytes. A chunk
-- that is there stays; those of older origins of its sample go when a history begins, with a chunk that starts at 0: to
-- look for them at every write would take longer with each. Readers pass over those that are left.
local r = redis.call('HMGET', group_key(ARGV[2]), 'state', 'attempt', 'kept')
if r[1] ~= 'leased' or r[2] ~= ARGV[3] then
  return redis.error_reply('LEASELOST ' .. (r[1] or 'gone') .. ' ' .. (r[2] or '0'))
end
if r[3] ~= ARGV[3] then
  redis.call('HSET', group_key(ARGV[2]), 'kept', ARGV[3])
  tell(ARGV[2], now_ms(ARGV[1]), 'attempt ' .. ARGV[3] .. ' has tokens salvaged')
end
local key, newest = salvage_key(ARGV[2]), {}
for i = 4, #ARGV, 2 do
  local index, origin, start = string.match(ARGV[i], '^(%d+):(%d+):(%d+):')
  if tonumber(start) == 0 then
    newest[index] = math.max(newest[index] or 0, tonumber(origin))
  end
  redis.call('HSETNX', key, ARGV[i], ARGV[i + 1])
end
for _, name in ipairs(next(newest) and redis.call('HKEYS', key) or {}) do
  local index, origin = string.match(name, '^(%d+):(%d+):')
  if index and newest[index] and tonumber(origin) < newest[index] then
    redis.call('HDEL', key, name)
  end
end
return 1
