-- KEYS: <ns>:{<fleet>}:fleet:epoch (hash: number run token deadline ttl_ms invitation frozen). Beside it, in the same slot:
-- fleet:acks:<epoch> (hash replica -> host) and fleet:members:<epoch> (membership), which expire.
-- ARGV: run, token, ms until the deadline, invitation. Returns the number.
local e = redis.call('HMGET', KEYS[1], 'run', 'token')
if e[1] == ARGV[1] and tonumber(ARGV[2]) < tonumber(e[2]) then
  return redis.error_reply('FENCED token ' .. ARGV[2] .. ' is older than ' .. e[2] .. ' of the newest epoch')
end
allow_when_full()
local number = redis.call('HINCRBY', KEYS[1], 'number', 1)
redis.call('HSET', KEYS[1], 'run', ARGV[1], 'token', ARGV[2], 'deadline', int(now_ms() + ARGV[3]), 'ttl_ms', ARGV[3],
  'invitation', ARGV[4], 'frozen', '')
return number
