-- Counts the ledger's figures from the streams and the submissions, without the ledger.
-- Returns {accepted, trained, delivered, filtered, stale, dead, cancelled, queued, leased, experience}.
local accepted, ended = 0, {t = 0, d = 0, f = 0, s = 0, x = 0, c = 0}
for _, sid in ipairs(redis.call('SMEMBERS', P .. 'subs')) do
  local marks = redis.call('GET', P .. 'sub:' .. sid)
  accepted = accepted + #marks
  for letter in pairs(ended) do
    local _, hits = string.gsub(marks, letter, '')
    ended[letter] = ended[letter] + hits
  end
end
local queued, leased = 0, 0
for _, purpose in ipairs({'train', 'eval', 'collect'}) do
  if redis.call('EXISTS', rollouts(purpose)) == 1 then
    local entries = redis.call('XLEN', rollouts(purpose))
    local held = 0
    for _, consumer in ipairs(redis.call('XPENDING', rollouts(purpose), ENGINES)[4] or {}) do
      if consumer[1] ~= RETURNED then
        held = held + tonumber(consumer[2])
      end
    end
    queued, leased = queued + entries - held, leased + held
  end
end
return {accepted, ended.t, ended.d, ended.f, ended.s, ended.x, ended.c, queued, leased, redis.call('XLEN', P .. 'experience')}
