-- KEYS: <ns>:{<fleet>}:fleet:lender (hash: epoch holder until). ARGV: holder, ttl_ms.
-- Returns the holder's epoch, 0 while another one leads.
local l = redis.call('HMGET', KEYS[1], 'epoch', 'holder', 'until')
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local alive = l[3] and tonumber(l[3]) > now
if alive and l[2] ~= ARGV[1] then
  return 0
end
local epoch = tonumber(l[1] or '0')
if l[2] ~= ARGV[1] then
  epoch = epoch + 1
end
redis.call('HSET', KEYS[1], 'epoch', epoch, 'holder', ARGV[1], 'until', string.format('%d', now + ARGV[2]))
return epoch
