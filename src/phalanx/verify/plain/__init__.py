"""A second, plain implementation of what phalanx trains, written from the papers: it shares no line
with phalanx's own, so that neither repeats an error of the other."""
