-- KEYS: <ns>:{<fleet>}:fleet:lender (hash: epoch holder until ttl_ms). ARGV: holder, ttl_ms.
-- Returns the holder's epoch, 0 while another one leads.
local l = redis.call('HMGET', KEYS[1], 'epoch', 'holder', 'until', 'ttl_ms')
local now = now_ms('')
if l[2] ~= ARGV[1] and time_left(l[3], l[4], now) then
  return 0
end
local epoch = tonumber(l[1] or '0')
if l[2] ~= ARGV[1] then
  epoch = epoch + 1
end
allow_when_full()
redis.call('HSET', KEYS[1], 'epoch', epoch, 'holder', ARGV[1], 'until', int(now + ARGV[2]), 'ttl_ms', ARGV[2])
return epoch
