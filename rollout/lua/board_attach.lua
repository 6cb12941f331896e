-- KEYS: <ns>:{<fleet>}:fleet:attached. ARGV: the run its caller saw attached or "", the new run or "".
-- 1 when it was still so.
local seen = redis.call('GET', KEYS[1]) or ''
if seen ~= ARGV[1] and seen ~= ARGV[2] then
  return 0
end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
else
  allow_when_full()
  redis.call('SET', KEYS[1], ARGV[2])
end
return 1
