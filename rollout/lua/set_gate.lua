-- ARGV: token, groups, max_age.
local refused = fenced(ARGV[1])
if refused then
  return refused
end
allow_when_full()
redis.call('HSET', P .. 'gate', 'credits', ARGV[2], 'max_age', ARGV[3])
return 1
