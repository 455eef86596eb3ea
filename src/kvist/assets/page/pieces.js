// Which token wrote which part of a text. A stream's chunk has text and the tokens behind it; most spell exactly what they
// show, but marks show nothing and a character may need several tokens. Knows nothing of streams or elements.

/**
 * One part of `text` for each token, joined they are `text` again. A token whose spelling is found takes it; what lies between
 * goes to the first token of the run that was not found, and a rest to the last one.
 */
export function split(text, tokens) {
  const parts = tokens.map(() => "");
  let done = 0;
  let lost = -1;
  tokens.forEach((token, at) => {
    const spelled = token !== "" && !token.includes("\uFFFD");
    const found = !spelled ? -1 : lost < 0 ? (text.startsWith(token, done) ? done : -1) : text.indexOf(token, done);
    if (found < 0) {
      if (lost < 0) lost = at;
      return;
    }
    if (lost >= 0) parts[lost] = text.slice(done, found);
    parts[at] = token;
    done = found + token.length;
    lost = -1;
  });
  if (tokens.length) parts[lost >= 0 ? lost : tokens.length - 1] += text.slice(done);
  return parts;
}
