-- ARGV: consumer. DELCONSUMER discards what the consumer still holds, so only an idle one is removed.
local consumer, idle = ARGV[1], true
allow_when_full()
for _, purpose in ipairs({'train', 'eval', 'collect'}) do
  local stream = rollouts(purpose)
  if redis.call('EXISTS', stream) == 1 then
    if #redis.call('XPENDING', stream, ENGINES, '-', '+', '1', consumer) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', stream, ENGINES, consumer)
    else
      idle = false
    end
  end
end
if idle then
  redis.call('HDEL', P .. 'calls', consumer)
end
return idle and 1 or 0
