-- ARGV: group id. Takes its dead letters away; the ledger counts it as dead still. Returns how many there were.
local gid, dropped = ARGV[1], 0
allow_when_full()
for _, item in ipairs(redis.call('XRANGE', P .. 'dead', '-', '+')) do
  if item[2][2] == gid then
    unletter(item[1], gid)
    dropped = dropped + 1
  end
end
return dropped
