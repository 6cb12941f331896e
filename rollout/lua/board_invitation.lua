-- KEYS: <ns>:{<fleet>}:fleet:epoch. Returns {number, invitation} of the newest epoch until its deadline, else nil. One that
-- lies twice as far ahead as it was to is of a clock that was set back since.
local e = redis.call('HMGET', KEYS[1], 'number', 'invitation', 'deadline', 'ttl_ms')
local left = e[1] and tonumber(e[3]) - now_ms() or 0
if left <= 0 or left > 2 * tonumber(e[4] or left) then
  return false
end
return {tonumber(e[1]), e[2]}
