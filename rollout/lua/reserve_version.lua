-- ARGV: token, at_least. Returns the number.
local refused = fenced(ARGV[1])
if refused then
  return refused
end
allow_when_full()
local number = math.max(tonumber(redis.call('HGET', P .. 'weights', 'counter') or 0) + 1, tonumber(ARGV[2]))
redis.call('HSET', P .. 'weights', 'counter', int(number))
return number
