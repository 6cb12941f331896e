-- ARGV: token, batch_groups, eta.
local refused = fenced(ARGV[1])
if refused then
  return refused
end
allow_when_full()
redis.call('HSET', P .. 'gate', 'batch_groups', ARGV[2], 'eta', ARGV[3], 'credits', int(ARGV[2] * (ARGV[3] + 1)))
return 1
