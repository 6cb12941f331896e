-- KEYS: <ns>:{<fleet>}:fleet:lender. Beside it, in the same slot: fleet:wish. ARGV: epoch, wish, ttl_ms.
local newest = redis.call('HGET', KEYS[1], 'epoch') or '0'
if tonumber(ARGV[1]) ~= tonumber(newest) then
  return redis.error_reply('FENCED epoch ' .. ARGV[1] .. ' is not the newest, ' .. newest)
end
allow_when_full()
redis.call('SET', string.sub(KEYS[1], 1, -7) .. 'wish', ARGV[2], 'PX', ARGV[3])
return 1
