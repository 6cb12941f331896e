-- ARGV: token, version, pointer (JSON).
local refused = fenced(ARGV[1])
if refused then
  return refused
end
local w = redis.call('HMGET', P .. 'weights', 'version', 'current', 'counter')
if w[2] == ARGV[3] then -- this very call, resent
  return 1
end
if tonumber(ARGV[2]) <= tonumber(w[1] or -1) then
  return redis.error_reply('FENCED version ' .. ARGV[2] .. ' is not larger than the current ' .. w[1])
end
allow_when_full()
redis.call('HSET', P .. 'weights', 'version', ARGV[2], 'current', ARGV[3], 'counter',
  int(math.max(tonumber(w[3] or 0), tonumber(ARGV[2]))))
return 1
