-- ARGV: token.
return fenced(ARGV[1]) or 1
