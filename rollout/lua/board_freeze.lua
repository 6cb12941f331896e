-- KEYS: <ns>:{<fleet>}:fleet:epoch. ARGV: token, epoch, membership, ttl_s. Frozen once.
local e = redis.call('HMGET', KEYS[1], 'number', 'token', 'frozen')
local members = F .. 'members:' .. ARGV[2]
if e[1] == ARGV[2] and e[2] == ARGV[1] and redis.call('GET', members) == ARGV[3] then -- this very call, resent
  return 1
end
if e[1] ~= ARGV[2] or e[2] ~= ARGV[1] or e[3] ~= '' then
  return redis.error_reply('FENCED token ' .. ARGV[1] .. ' cannot freeze epoch ' .. ARGV[2] .. '; the newest is '
    .. (e[1] or 'none') .. ' of token ' .. (e[2] or 'none') .. (e[3] == '1' and ', frozen' or ''))
end
allow_when_full()
redis.call('HSET', KEYS[1], 'frozen', '1')
redis.call('SET', members, ARGV[3], 'EX', ARGV[4])
return 1
