-- 1 while the writer's claim has not run out.
local w = redis.call('HMGET', P .. 'writer', 'owner', 'until')
return (w[1] or '') ~= '' and tonumber(w[2]) > now_ms('') and 1 or 0
