-- ARGV: now or "", token, nonce, count, group ids... Returns {group id, request, result} each.
-- Everything at or before the cursor is held by this token or ended; acquiring the writer's claim resets the cursor, which
-- frees what earlier tokens held.
local refused = fenced(ARGV[2])
if refused then
  return refused
end
local now, token, nonce, want = now_ms(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])
local stream = P .. 'experience'
local out, granted = {}, {}

-- To the writer, which did not hold it.
local function hold(gid)
  redis.call('HSET', group_key(gid), 'holder', token)
  tell(gid, now, 'taken by writer ' .. token)
end

local function give(gid, r)
  out[#out + 1] = {gid, r[1], r[2]}
  granted[#granted + 1] = gid
end

local w = redis.call('HMGET', P .. 'writer', 'cursor', 'call')
if w[2] and string.sub(w[2], 1, #nonce + 1) == nonce .. ' ' then -- this very call, resent
  for gid in string.gmatch(string.sub(w[2], #nonce + 2), '%S+') do
    local r = redis.call('HMGET', group_key(gid), 'request', 'result', 'state')
    if r[3] == 'experience' then
      give(gid, r)
    end
  end
  return out
end

check_kinds()
allow_when_full()
for i = 5, #ARGV do
  local r = redis.call('HMGET', group_key(ARGV[i]), 'request', 'result', 'state')
  if #out < want and r[3] == 'experience' and r[1] and r[2] then
    if redis.call('HGET', group_key(ARGV[i]), 'holder') ~= token then
      hold(ARGV[i])
    end
    give(ARGV[i], r)
  end
end

local cursor = w[1] or '0-0'
while #ARGV == 4 and #out < want do
  local entries = redis.call('XRANGE', stream, '(' .. cursor, '+', 'COUNT', int(want - #out))
  if #entries == 0 then
    break
  end
  for _, item in ipairs(entries) do
    local gid = item[2][2] or ''
    local r = redis.call('HMGET', group_key(gid), 'request', 'result', 'holder', 'entry')
    cursor = item[1]
    if not is_open(gid) or (r[4] or cursor) ~= cursor then -- not written by complete
      redis.call('XDEL', stream, cursor)
      dead_letter(gid, 'corrupt: stream entry ' .. cursor .. ' names no scored group', now)
    elseif not (r[1] and r[2]) then
      redis.call('XDEL', stream, cursor)
      finish(gid, 'train', 'experience', 'dead', 'corrupt: record lost', now)
    elseif r[3] ~= token then
      hold(gid)
      give(gid, r)
    end
  end
end
redis.call('HSET', P .. 'writer', 'cursor', cursor)
if #granted > 0 then
  redis.call('HSET', P .. 'writer', 'call', nonce .. ' ' .. table.concat(granted, ' '))
end
return out
