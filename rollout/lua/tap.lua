-- ARGV: stream id, most entries. Reads only, so it disturbs no lease and no cursor of the writer.
-- Returns {groups scored, how often one died, newest id ever given in the experience stream, {{entry id, group id}, ...}}: the
-- entries beyond ARGV[1], oldest first. "Scored" counts those that were trained, filtered or stale, and those waiting.
local stream = P .. 'experience'
local scored = 0
for _, value in ipairs(redis.call('HMGET', LEDGER, 'trained', 'filtered', 'stale', 'experience:train')) do
  scored = scored + tonumber(value or 0)
end
local deaths = tonumber(redis.call('HGET', LEDGER, 'dead') or 0) + tonumber(redis.call('GET', P .. 'retried') or 0)
local newest, found = '0-0', {}
if redis.call('EXISTS', stream) == 1 then
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      newest = info[i + 1]
    end
  end
  for i, item in ipairs(redis.call('XRANGE', stream, '(' .. ARGV[1], '+', 'COUNT', ARGV[2])) do
    found[i] = {item[1], item[2][2] or ''}
  end
end
return {scored, deaths, newest, found}
