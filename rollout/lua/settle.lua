-- ARGV: now or "", token, outcome, reason, group ids... Returns how many ended now.
local refused = fenced(ARGV[2])
if refused then
  return refused
end
local now, outcome, reason, ended = now_ms(ARGV[1]), ARGV[3], ARGV[4], 0
for i = 5, #ARGV do
  local r = redis.call('HMGET', group_key(ARGV[i]), 'state', 'entry')
  if r[1] == 'experience' then
    redis.call('XDEL', P .. 'experience', r[2])
    finish(ARGV[i], 'train', 'experience', outcome, reason, now)
    ended = ended + 1
  end
end
return ended
