-- ARGV: now or "" (unused), group id, attempt, then per chunk its name and its bytes. A chunk that is there stays.
local r = redis.call('HMGET', group_key(ARGV[2]), 'state', 'attempt')
if r[1] ~= 'leased' or r[2] ~= ARGV[3] then
  return redis.error_reply('LEASELOST ' .. (r[1] or 'gone') .. ' ' .. (r[2] or '0'))
end
for i = 4, #ARGV, 2 do
  redis.call('HSETNX', salvage_key(ARGV[2]), ARGV[i], ARGV[i + 1])
end
return 1
