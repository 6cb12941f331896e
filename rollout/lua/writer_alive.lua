-- 1 while the writer's claim has not run out.
local w = redis.call('HMGET', P .. 'writer', 'owner', 'until', 'ttl_ms')
return (w[1] or '') ~= '' and time_left(w[2], w[3], now_ms('')) and 1 or 0
