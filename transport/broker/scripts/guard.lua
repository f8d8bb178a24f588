-- Put behind the prelude in front of every script but those that claim: nothing of another run is read or changed.

do
  local refused = refuse_other_run()
  if refused then
    return refused
  end
end
