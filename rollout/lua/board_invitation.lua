-- KEYS: <ns>:{<fleet>}:fleet:epoch. Returns {number, invitation} of the newest epoch until its deadline, else nil.
local e = redis.call('HMGET', KEYS[1], 'number', 'invitation', 'deadline')
local t = redis.call('TIME')
if not e[1] or t[1] * 1000 + math.floor(t[2] / 1000) >= tonumber(e[3]) then
  return false
end
return {tonumber(e[1]), e[2]}
