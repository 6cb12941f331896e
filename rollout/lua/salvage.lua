-- ARGV: now or "" (unused), group id, attempt, encoded samples or "" for none.
local key = group_key(ARGV[2])
local r = redis.call('HMGET', key, 'state', 'attempt')
if r[1] ~= 'leased' or r[2] ~= ARGV[3] then
  return redis.error_reply('LEASELOST ' .. (r[1] or 'gone') .. ' ' .. (r[2] or '0'))
end
if ARGV[4] == '' then
  redis.call('HDEL', key, 'salvage')
else
  redis.call('HSET', key, 'salvage', ARGV[4])
end
return 1
