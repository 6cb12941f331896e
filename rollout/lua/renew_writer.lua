-- ARGV: now or "", token, ttl_ms.
local refused = fenced(ARGV[2])
if refused then
  return refused
end
allow_when_full()
redis.call('HSET', P .. 'writer', 'until', int(now_ms(ARGV[1]) + tonumber(ARGV[3])), 'ttl_ms', ARGV[3])
return 1
