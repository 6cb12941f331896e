-- ARGV: token. The number stays the newest, so that it is never given again.
local w = redis.call('HMGET', P .. 'writer', 'token', 'owner')
if w[1] == ARGV[1] and w[2] == '' then -- this very call, resent
  return 1
end
local refused = fenced(ARGV[1])
if refused then
  return refused
end
allow_when_full()
redis.call('HSET', P .. 'writer', 'owner', '', 'until', '0')
return 1
