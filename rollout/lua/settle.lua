-- ARGV: now or "", token, outcome, reason, group ids... Returns how many ended now.
local refused = fenced(ARGV[2])
if refused then
  return refused
end
check_kinds()
local now, outcome, reason, ended = now_ms(ARGV[1]), ARGV[3], ARGV[4], 0
for i = 5, #ARGV do
  local r = redis.call('HMGET', group_key(ARGV[i]), 'state', 'entry', 'purpose')
  local experience = r[1] == 'experience'
  -- Trained, and yet to be generated: the server's data are of a time before the checkpoint that contains it.
  local again = outcome == 'trained' and r[3] == 'train' and (r[1] == 'queued' or r[1] == 'leased')
  if experience then
    redis.call('XDEL', P .. 'experience', r[2])
  elseif again then
    remove_entry('train', ARGV[i], r[2])
  end
  if experience or again then
    finish(ARGV[i], 'train', r[1], outcome, reason, now)
    ended = ended + 1
  end
end
return ended
