-- Claim the name for a start of a run, or renew the claim.  Request: claim, after.  Reply: 1. Idempotent.

local request = cjson.decode(ARGV[3])
return hold_run(request.claim, request.after) or 1
